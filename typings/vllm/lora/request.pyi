# Written by tests/served/stubs.py out of the installed package: do not edit.

class LoRARequest:
    lora_name: str
    lora_int_id: int
    load_inplace: bool
