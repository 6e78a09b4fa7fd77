"""The maths: schedules, processes, times, exact categorical draws. Imports only `types`."""
