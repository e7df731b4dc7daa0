"""How arrays get from the devices of one rank of a pipeline to those of another."""
