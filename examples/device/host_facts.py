"""Facts of the device `host`; this module imports no torch."""

from mtrain.config.machine.devices import DeviceFacts

FACTS = DeviceFacts(name="host", on_host=True, fused_adam=True, fork_safe=True)
