# The Lambda recipe, all seven stages: each starts from the weights of the one before as trained, not averaged, with a
# fresh optimizer, average and schedule, and its data from the beginning. The same line again goes on where it stopped;
# --stage NAME trains one. Stages 1 and 2 are of OpenVid-1M, the others of MiraData too.
#   torchrun --nnodes 24 --nproc_per_node 8 -m longtake train opensora_v1_2/lambda
#   longtake plan opensora_v1_2/lambda --gpus 192 --gpu h100 --stage stage1

exp_name = "lambda"
_few = dict(data_path="openvid.parquet")
_all = dict(data_path="openvid_miradata.parquet")
stages = [
    dict(name="stage1", run="lambda_1.py", dataset=_few),
    dict(name="stage2", run="lambda_2.py", dataset=_few),
    dict(name="stage3", run="lambda_3.py", dataset=_all),
    dict(name="stage4", run="lambda_4.py", dataset=_all),
    dict(name="stage5", run="lambda_5.py", dataset=_all),
    dict(name="stage6", run="lambda_6.py", dataset=_all),
    dict(name="stage7", run="lambda_7.py", dataset=_all),
]
