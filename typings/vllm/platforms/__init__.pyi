# Written by tests/served/stubs.py out of the installed package: do not edit.

from vllm.platforms.interface import Platform

current_platform: Platform
