"""Ground floor: devices as a named mesh, placements of arrays on it, collectives, the process group."""

from jaxpar.mesh._distributed import init_process_group as init_process_group
from jaxpar.mesh._fingerprint import assert_same_everywhere as assert_same_everywhere
from jaxpar.mesh._init_mesh import MeshLike as MeshLike
from jaxpar.mesh._init_mesh import as_device_mesh as as_device_mesh
from jaxpar.mesh._init_mesh import as_jax_mesh as as_jax_mesh
from jaxpar.mesh._init_mesh import axes_of as axes_of
from jaxpar.mesh._init_mesh import axis_size as axis_size
from jaxpar.mesh._init_mesh import init_device_mesh as init_device_mesh
from jaxpar.mesh._leave import destroy_process_group as destroy_process_group
from jaxpar.mesh._mesh import DeviceMesh as DeviceMesh
from jaxpar.mesh._objects import all_gather_object as all_gather_object
from jaxpar.mesh._objects import broadcast_object as broadcast_object
from jaxpar.mesh._objects import process_allgather as process_allgather
from jaxpar.mesh._process_group import barrier as barrier
from jaxpar.mesh._process_group import get_local_rank as get_local_rank
from jaxpar.mesh._process_group import get_rank as get_rank
from jaxpar.mesh._process_group import get_world_size as get_world_size
from jaxpar.mesh._process_group import is_initialized as is_initialized
from jaxpar.mesh._warm_up import warm_up as warm_up
