"""See what a program communicates and where an array lies."""

from jaxpar.debug._check import assert_collectives as assert_collectives
from jaxpar.debug._collectives import collectives as collectives
from jaxpar.debug._table import Collective as Collective
from jaxpar.debug._table import CollectiveTable as CollectiveTable
