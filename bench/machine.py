from .core.machine import *  # noqa: F403 - until all suites import bench.core
