"""The compute: typed Python functions over the C++ core in csrc/, and a plain-torch reference of every kernel."""
