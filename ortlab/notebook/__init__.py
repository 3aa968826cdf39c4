"""The kit in a notebook: magics and widgets."""
