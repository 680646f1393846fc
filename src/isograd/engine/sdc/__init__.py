"""Silent data corruption, found while a program trains: in reductions, in what a rank computes, in what it keeps."""
