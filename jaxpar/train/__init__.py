"""The training step: the one place that knows all kinds of parallelism."""

from jaxpar.train._clip import clip_grad_norm as clip_grad_norm
from jaxpar.train._clip import total_norm as total_norm
from jaxpar.train._local_sgd import LocalSGDStep as LocalSGDStep
from jaxpar.train._step import TrainStep as TrainStep
