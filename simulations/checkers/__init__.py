"""What must hold in every world. Importing this package fills the table of checkers."""

from understudy.simulations.checkers import acknowledged as acknowledged
from understudy.simulations.checkers import committers as committers
from understudy.simulations.checkers import database as database
from understudy.simulations.checkers import deliveries as deliveries
from understudy.simulations.checkers import effects as effects
from understudy.simulations.checkers import forward as forward
from understudy.simulations.checkers import order as order
from understudy.simulations.checkers import rest as rest
from understudy.simulations.checkers import secrets as secrets
from understudy.simulations.checkers import timers as timers
from understudy.simulations.checkers import typed as typed
