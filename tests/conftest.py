"""What every test relies on, however the tests are started."""

from __future__ import annotations

import signal

from hypothesis import settings

# A shell that starts a command in the background makes it ignore Ctrl-C, and the processes of the tests inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("no wall time", deadline=None)
settings.load_profile("no wall time")
