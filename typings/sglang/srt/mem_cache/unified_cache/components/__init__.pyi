# Written by tests/served/stubs.py out of the installed package: do not edit.
