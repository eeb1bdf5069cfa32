"""The stages of `scripts/build_shapes_world.py`: one module per trained part."""
