"""Ground floor: devices as a named mesh, placements of arrays on it, collectives, the process group."""
