"""The planner behind every "auto": costs, measured rates, predictions and the search over layouts."""
