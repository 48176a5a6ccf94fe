"""One file per family of operators, the WGSL beside the Python. What fills the registry: families.py."""
