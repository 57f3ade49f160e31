import sys

from runtime.errors import need_torch, quiet_interrupt

need_torch()  # before a script imports what needs it
if sys.argv[0] == "-m":
    quiet_interrupt()
