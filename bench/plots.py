from .core.plot import *  # noqa: F403 - until all suites import bench.core
