"""Feed processes: who reads which sample, and global arrays out of each process's own slice."""

from jaxpar.data._global_batch import global_batch as global_batch
from jaxpar.data._join import join as join
from jaxpar.data._pad import pad_batch as pad_batch
from jaxpar.data._sampler import DistributedSampler as DistributedSampler
