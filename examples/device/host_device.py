"""The device `host`: the functions of the CPU under another name."""

from dataclasses import replace

from mtrain.devices.cpu import CPU

DEVICE = replace(CPU, name="host")
