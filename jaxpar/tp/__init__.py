"""Tensor parallelism: the maths of a layer is split over the ranks of a mesh axis."""

from jaxpar.tp._attention import AttentionParallel as AttentionParallel
from jaxpar.tp._auto_plan import ProposedPlan as ProposedPlan
from jaxpar.tp._auto_plan import auto_plan as auto_plan
from jaxpar.tp._collective_matmul import all_gather_matmul as all_gather_matmul
from jaxpar.tp._collective_matmul import matmul_reduce_scatter as matmul_reduce_scatter
from jaxpar.tp._colwise import ColwiseParallel as ColwiseParallel
from jaxpar.tp._context import ContextParallel as ContextParallel
from jaxpar.tp._cross_entropy import cross_entropy as cross_entropy
from jaxpar.tp._functional import column_linear as column_linear
from jaxpar.tp._functional import row_linear as row_linear
from jaxpar.tp._functional import vocab_embedding as vocab_embedding
from jaxpar.tp._parallelize import parallelize_module as parallelize_module
from jaxpar.tp._prepare import PrepareModuleInput as PrepareModuleInput
from jaxpar.tp._prepare import PrepareModuleInputOutput as PrepareModuleInputOutput
from jaxpar.tp._prepare import PrepareModuleOutput as PrepareModuleOutput
from jaxpar.tp._rowwise import RowwiseParallel as RowwiseParallel
from jaxpar.tp._sequence import SequenceParallel as SequenceParallel
from jaxpar.tp._style import ParallelStyle as ParallelStyle
