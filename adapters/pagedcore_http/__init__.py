"""What every HTTP door shares, over Starlette: body limits, event streams, error to status, disconnect, drain, salts.

Knows no web framework beyond Starlette and nothing of the engine but its errors. Starlette comes with the framework of
the door, such as ``pagedcore[bentoml]``; importing this package alone needs neither.
"""
