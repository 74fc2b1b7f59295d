"""`scripts/bench`: how long and how much, each as a ratio to a floor taken in the same run."""
