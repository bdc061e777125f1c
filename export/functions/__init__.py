"""Nodes of our own in every backend's graph: functions, with standard operators as bodies."""
