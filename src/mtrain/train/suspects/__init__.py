"""Steps that look wrong, computed again to find out whether the data or a device is at fault."""
