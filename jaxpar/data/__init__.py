"""Feed processes: who reads which sample, and global arrays out of each process's own slice, ahead of the step."""

from jaxpar.data._global_batch import global_batch as global_batch
from jaxpar.data._grain import GrainSource as GrainSource
from jaxpar.data._join import join as join
from jaxpar.data._loader import DataLoader as DataLoader
from jaxpar.data._pad import pad_batch as pad_batch
from jaxpar.data._plan import BatchRows as BatchRows
from jaxpar.data._prefetch import PrefetchIterator as PrefetchIterator
from jaxpar.data._prefetch import prefetch_to_device as prefetch_to_device
from jaxpar.data._sampler import DistributedSampler as DistributedSampler
