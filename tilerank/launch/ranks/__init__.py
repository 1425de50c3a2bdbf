"""The ranks of a group: who a process is, how the ranks are started, where they meet, and what each of them does."""
