"""The time of a step: products, attention, memory, communication, pipeline, optimizer."""

from mtrain.plan.time.step import StepTime, step_time

__all__ = ["StepTime", "step_time"]
