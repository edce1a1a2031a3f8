# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
