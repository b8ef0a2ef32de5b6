"""The time of a step by part: products, attention, memory-bound operations, communication,
pipeline, optimizer.
"""

from mtrain.plan.time.step import StepTime, step_time

__all__ = ["StepTime", "step_time"]
