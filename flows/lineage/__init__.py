"""Records of forks, in the fork and in the runs whose artifacts it refers to."""
