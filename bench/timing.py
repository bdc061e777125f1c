from .core.clock import *  # noqa: F403 - until all suites import bench.core
