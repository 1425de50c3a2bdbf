"""The compute: typed Python faces of the C++ core in csrc/, and a plain-torch reference of every kernel."""
