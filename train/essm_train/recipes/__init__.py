# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Tasks and experiments as YAML files, one each, and their reader. They are installed with the library."""
