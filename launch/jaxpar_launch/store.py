"""The job store: keys and values that all processes of one job share, over TCP, standard library only.

    StoreServer  <--  StoreClient (rank 0)      set, get, add, compare_set, wait, keys, delete
                 <--  StoreClient (rank 1)      a wait has a deadline and its error lists the missing keys
                 <--  ...                       every connection proves the job token; nothing is unpickled

The launcher hosts it, so it outlives any worker; the process level of `jaxpar.mesh` meets in it.
"""

from jaxpar_launch._store_client import StoreClient as StoreClient
from jaxpar_launch._store_server import StoreServer as StoreServer
from jaxpar_launch._store_wire import StoreAuthenticationError as StoreAuthenticationError
from jaxpar_launch._store_wire import StoreError as StoreError
from jaxpar_launch._store_wire import StoreTimeoutError as StoreTimeoutError
from jaxpar_launch._store_wire import StoreValue as StoreValue
