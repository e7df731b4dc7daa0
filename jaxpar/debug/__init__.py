"""See what a program communicates and where an array lies."""

from jaxpar.debug._check import assert_collectives as assert_collectives
from jaxpar.debug._collectives import collectives as collectives
from jaxpar.debug._compilations import CompilationCount as CompilationCount
from jaxpar.debug._compilations import count_compilations as count_compilations
from jaxpar.debug._memory import MemoryUse as MemoryUse
from jaxpar.debug._memory import memory as memory
from jaxpar.debug._overlap import OverlapReport as OverlapReport
from jaxpar.debug._overlap import ScheduledCollective as ScheduledCollective
from jaxpar.debug._overlap import overlap as overlap
from jaxpar.debug._table import Collective as Collective
from jaxpar.debug._table import CollectiveTable as CollectiveTable
from jaxpar.debug._topology import topology as topology
from jaxpar.debug._visualize import ShardingPicture as ShardingPicture
from jaxpar.debug._visualize import ShardingTable as ShardingTable
from jaxpar.debug._visualize import visualize_sharding as visualize_sharding
