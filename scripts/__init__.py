from runtime.errors import need_torch

need_torch()  # before a script imports what needs it
