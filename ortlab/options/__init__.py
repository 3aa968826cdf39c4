"""Every switch of ORTModule, declared once; options, variables and files that set them."""
