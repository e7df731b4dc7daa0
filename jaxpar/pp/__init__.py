"""Pipeline parallelism: a schedule is data, proved lawful when it is made, simulated, drawn and run."""

from jaxpar.pp._schedule._action import Action as Action
from jaxpar.pp._schedule._action import Op as Op
from jaxpar.pp._schedule._costs import Costs as Costs
from jaxpar.pp._schedule._passes._bubbles import with_bubbles as with_bubbles
from jaxpar.pp._schedule._passes._bubbles import without_bubbles as without_bubbles
from jaxpar.pp._schedule._schedule import Schedule as Schedule
from jaxpar.pp._schedule._simulate import simulate as simulate
from jaxpar.pp._schedule._timeline import Event as Event
from jaxpar.pp._schedule._timeline import Message as Message
from jaxpar.pp._schedule._timeline import Timeline as Timeline
