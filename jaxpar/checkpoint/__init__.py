"""Checkpoints over Orbax: saved from any layout, restored into any other."""

from jaxpar._errors import CheckpointError as CheckpointError
from jaxpar.checkpoint._manager import CheckpointManager as CheckpointManager
from jaxpar.checkpoint._manager import Restored as Restored
from jaxpar.checkpoint._metadata import ArrayMetadata as ArrayMetadata
from jaxpar.checkpoint._metadata import CheckpointMetadata as CheckpointMetadata
from jaxpar.checkpoint._metadata import metadata as metadata
from jaxpar.checkpoint._metadata import steps as steps
from jaxpar.checkpoint._metadata import verify as verify
