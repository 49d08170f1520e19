"""What goes wrong, by kind. Importing this package fills the table of faults."""

from understudy.simulations.faults import calls as calls
from understudy.simulations.faults import change as change
from understudy.simulations.faults import clock as clock
from understudy.simulations.faults import handlers as handlers
from understudy.simulations.faults import orders as orders
from understudy.simulations.faults import process as process
from understudy.simulations.faults import storage as storage
