"""The training step: the one place that knows all kinds of parallelism."""

from jaxpar.train._clip import clip_grad_norm as clip_grad_norm
from jaxpar.train._clip import total_norm as total_norm
from jaxpar.train._ema import averaged as averaged
from jaxpar.train._ema import ema as ema
from jaxpar.train._local_sgd import LocalSGDStep as LocalSGDStep
from jaxpar.train._spikes import skip_spikes as skip_spikes
from jaxpar.train._step import TrainStep as TrainStep
