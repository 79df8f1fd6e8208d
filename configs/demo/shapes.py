# The run of `longtake demo`, ready to be changed: any key set here replaces the demo's.
#   longtake train configs/demo/shapes.py --dataset.data_path outputs/demo/clips/clips.parquet
_base_ = "../../longtake/demo/shapes.py"
