"""`python -m understudy.demo`."""

import sys

from understudy.demo.play import main

sys.exit(main())
