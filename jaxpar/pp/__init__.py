"""Pipeline parallelism: a schedule is data, proved lawful when it is made, simulated, drawn and run."""

from jaxpar.pp._by_hand import PipelineStages as PipelineStages
from jaxpar.pp._gathered import gathered as gathered
from jaxpar.pp._pipeline import PipelinePlan as PipelinePlan
from jaxpar.pp._pipeline import pipeline as pipeline
from jaxpar.pp._pipeline import plan_of as plan_of
from jaxpar.pp._schedule._action import Action as Action
from jaxpar.pp._schedule._action import Op as Op
from jaxpar.pp._schedule._auto_schedule import auto_schedule as auto_schedule
from jaxpar.pp._schedule._costs import Costs as Costs
from jaxpar.pp._schedule._get_schedule import get_schedule as get_schedule
from jaxpar.pp._schedule._get_schedule import schedule_names as schedule_names
from jaxpar.pp._schedule._passes._bubbles import with_bubbles as with_bubbles
from jaxpar.pp._schedule._passes._bubbles import without_bubbles as without_bubbles
from jaxpar.pp._schedule._passes._communication import add_communication as add_communication
from jaxpar.pp._schedule._passes._merge_backward import merge_backward as merge_backward
from jaxpar.pp._schedule._passes._reduce_grad import add_reduce_grad as add_reduce_grad
from jaxpar.pp._schedule._passes._unshard import add_unshard as add_unshard
from jaxpar.pp._schedule._render._figure import draw as draw
from jaxpar.pp._schedule._render._render import render as render
from jaxpar.pp._schedule._render._trace import chrome_trace as chrome_trace
from jaxpar.pp._schedule._schedule import Schedule as Schedule
from jaxpar.pp._schedule._simulate import simulate as simulate
from jaxpar.pp._schedule._timeline import Event as Event
from jaxpar.pp._schedule._timeline import Message as Message
from jaxpar.pp._schedule._timeline import Timeline as Timeline
