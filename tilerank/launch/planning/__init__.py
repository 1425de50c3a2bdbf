"""Memory before anything starts: what each rank will hold, how many tokens the cache gets, and `tilerank plan`."""
