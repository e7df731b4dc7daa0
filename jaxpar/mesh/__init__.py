"""Ground floor: devices as a named mesh, placements of arrays on it, collectives, the process group."""

from jaxpar.mesh._init_mesh import MeshLike as MeshLike
from jaxpar.mesh._init_mesh import as_device_mesh as as_device_mesh
from jaxpar.mesh._init_mesh import as_jax_mesh as as_jax_mesh
from jaxpar.mesh._init_mesh import axes_of as axes_of
from jaxpar.mesh._init_mesh import axis_size as axis_size
from jaxpar.mesh._init_mesh import init_device_mesh as init_device_mesh
from jaxpar.mesh._mesh import DeviceMesh as DeviceMesh
