"""Tensor parallelism: the maths of a layer is split over the ranks of a mesh axis."""

from jaxpar.tp._colwise import ColwiseParallel as ColwiseParallel
from jaxpar.tp._parallelize import parallelize_module as parallelize_module
from jaxpar.tp._prepare import PrepareModuleInput as PrepareModuleInput
from jaxpar.tp._prepare import PrepareModuleInputOutput as PrepareModuleInputOutput
from jaxpar.tp._prepare import PrepareModuleOutput as PrepareModuleOutput
from jaxpar.tp._rowwise import RowwiseParallel as RowwiseParallel
from jaxpar.tp._sequence import SequenceParallel as SequenceParallel
from jaxpar.tp._style import ParallelStyle as ParallelStyle
