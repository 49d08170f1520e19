"""The worlds that we play. Importing this package fills the table of scenarios."""

from understudy.simulations import probes as probes
from understudy.simulations.scenarios import deployment as deployment
from understudy.simulations.scenarios import fan as fan
from understudy.simulations.scenarios import fork_and_join as fork_and_join
from understudy.simulations.scenarios import handover as handover
from understudy.simulations.scenarios import long_loop as long_loop
from understudy.simulations.scenarios import message_before_wait as message_before_wait
from understudy.simulations.scenarios import mixed as mixed
from understudy.simulations.scenarios import nested_joins as nested_joins
from understudy.simulations.scenarios import poison as poison
from understudy.simulations.scenarios import random_processes as random_processes
from understudy.simulations.scenarios import saga_failures as saga_failures
from understudy.simulations.scenarios import subscriber as subscriber
from understudy.simulations.scenarios import time_to_live as time_to_live
from understudy.simulations.scenarios import timer_against_cancel as timer_against_cancel
