"""Checkpoints over Orbax: saved from any layout, restored into any other; weights to and from safetensors."""

from jaxpar._errors import CheckpointError as CheckpointError
from jaxpar.checkpoint._load_safetensors import load_safetensors as load_safetensors
from jaxpar.checkpoint._manager import CheckpointManager as CheckpointManager
from jaxpar.checkpoint._manager import Restored as Restored
from jaxpar.checkpoint._metadata import ArrayMetadata as ArrayMetadata
from jaxpar.checkpoint._metadata import CheckpointMetadata as CheckpointMetadata
from jaxpar.checkpoint._metadata import metadata as metadata
from jaxpar.checkpoint._metadata import steps as steps
from jaxpar.checkpoint._metadata import verify as verify
from jaxpar.checkpoint._offline import checkpoint_to_safetensors as checkpoint_to_safetensors
from jaxpar.checkpoint._offline import safetensors_to_checkpoint as safetensors_to_checkpoint
from jaxpar.checkpoint._save_safetensors import save_safetensors as save_safetensors
from jaxpar.checkpoint._tensors import Tensors as Tensors
