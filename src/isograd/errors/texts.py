"""The texts of errors, those of comm and engine apart (texts_of_engine.py)."""

TEXTS = """
IG101: invalid layout: {problems}
  expected: axes with their sizes, as in {example!r}
  fix:      fix every point above; 'isograd explain LAYOUT' draws what a layout means
IG102: no such axes: {axes}
  expected: 'pp', 'dp', 'cp', 'tp', several of them ('dp cp'), a block ('tp/2'), a stride ('cp%2'), some members of
            which this rank is one ('pp:0+3'), 'ep' or 'edp', or 'world'
IG103: layout {layout!r} has no such rank
IG104: blocks of {length} do not divide axis {axis} of {size} ranks
  expected: a divisor of {size}
IG110: layout {layout!r} needs {needed} ranks, this world has {size}
  seen:     world of {size}
  expected: world of {needed}
  fix:      start {needed} ranks, or one of these layouts fits {size}: {fits}
IG111: a mesh of a running world cannot be pickled, nor a model that holds one
  expected: torch.save(model.state_dict(), ...), or isograd.checkpoint.CheckpointManager, which saves any layout
  fix:      build the model again from its config on the mesh of the world that loads it, then load its state
IG271: the programs of the ranks do not match
  expected: both ends of every message, no circle of waits, every gradient reduced once over its ranks, every element
            once in the norm and in a checkpoint
IG276: no layout of {devices} x {name} can run this
  expected: a layout that divides, and fits the memory of a device
IG291: ranks did not start within {wait_s:g} s
  expected: every rank of the world, started at about the same time (--wait)
  fix:      start this command on every machine with the same --nnodes, --master-addr and --master-port, and a
            --node-rank of its own
IG292: connections between ranks cannot be made
  expected: TCP between all machines, in both directions, at any port above 1023
  fix:      open these ports between the machines; ranks listen at ports that the system chooses ('sysctl
            net.ipv4.ip_local_port_range')
IG298: several machines need --master-addr and --node-rank
  fix:      the same command on every machine, but for --node-rank
IG299: the port at which ranks meet is used by another program
  expected: a free port of the first machine
  fix:      ss -ltnp names the program (an earlier run?): end it, or take another MASTER_PORT on all machines
IG301: parameter {leaf!r} of an isograd layer has no contract
  seen:     {kind} made it without declare(), or it was replaced later
  expected: declare(parameter, mesh, shape=..., shards=..., partial_over=...) where it is made
IG302: a parameter's local shape contradicts its contract
  expected: {local} of global {shape}
IG303: it is unknown which tokens this slice of a vocabulary holds
  seen:     a weight {shape} that is not declared as cut, under {layout!r}
  expected: declare(weight, mesh, shape=(vocab, hidden), shards=(Shard.even('tp', 0, vocab, tp),))
  fix:      declare it where it is made; a copy by .clone() or nn.Parameter(weight) has to be declared again
IG304: the axes of a contract contradict each other
  expected: data axes 'dp cp' with cuts over tp; or data axes 'edp' with cuts over ep and ties alone, as edp and
            ep are all ranks of a stage
  fix:      declare(..., shards=(Shard.even('ep', 0, experts, mesh.size('ep')),), data='edp') for routed experts
IG400: ep{ep} cuts experts, and this model has none
  expected: a config with experts, or a layout without ep
IG401: dropout needs the global ids of its tokens
  expected: model(tokens, labels, key=..., samples=ids of the sequences)
IG402: a vocabulary of {vocab} cannot be cut over tp{tp}
  expected: at least {tp} tokens
IG404: {inner} inner features cannot be cut over tp{tp}
  expected: at least {tp}
IG405: query heads must be a multiple of key/value heads
  expected: heads % kv_heads == 0
IG406: {heads} query and {kv_heads} key/value heads cannot be dealt out over tp{tp}
  expected: a tp that divides the query heads, and that divides or is divided by the key/value heads
  fix:      the nearest that works is tp{nearest}
IG407: Ulysses over {ranks} ranks needs at least one query head per rank
  expected: at least {ranks}
  fix:      'cpN ring', or both methods: 'cpN ulyssesM' with blocks of M, at most {heads}
IG408: dropout of attention probabilities is not built for ring attention
  seen:     attention dropout {dropout} under {layout!r}
  expected: attention dropout 0, or a cp of Ulysses alone
  fix:      set attention_dropout=0.0 in the config, or use 'cpN ulysses'; other dropout works with both
IG409: a gradient of a gradient was asked for, of an operation whose backward has no derivative
  seen:     create_graph=True in a backward through {operation}
  expected: first derivatives
  fix:      of a Transformer: F.cross_entropy(model(tokens), labels) on one device, with attention by
            torch.nn.attention.sdpa_kernel(SDPBackend.MATH), can be differentiated twice; else leave create_graph out
IG410: tokens, labels and documents must be [batch, sequence]
  expected: two dimensions, the same for all
IG411: the sequence is longer than the model's positions
  expected: at most {max_positions}
IG413: dropout without key and samples would differ between layouts
  expected: model(tokens, labels, key=isograd.core.rng.key(seed, step), samples=ids)
  fix:      pass both, or call model.eval()
IG414: ranks of one cp or tp group were given different sequences
  seen:     tokens, embeddings, labels or documents that differ from those of ranks {unlike}
  expected: the same whole sequences on every rank of a group: the model takes its own part of each
  fix:      index the data by mesh.index('dp'), not by mesh.index('dp cp') or the global rank; seed noise by it, too
IG415: a model cut into pipeline stages is not called; its pieces run in the order of a schedule
  expected: engine.train_step(batch, micro_batches=k), or engine.evaluate
IG417: the model was given token ids or labels outside its vocabulary
  expected: ids from 0 to vocabulary - 1; as a label also the ignore index, where there is no target
  fix:      tokenise with the model's own vocabulary; if another label marks positions without a target, such as -1,
            give it to the model: Transformer(..., ignore_index=-1)
IG418: a Transformer is made of a config and a mesh
  fix:      ig.models.Transformer(ig.models.TransformerConfig(vocab=256, hidden=64, layers=2, heads=2, mlp=256),
            ig.Mesh("dp2")); a folder of Hugging Face: ig.hf.load(path, ig.Mesh("dp2"))
IG421: no safetensors in {place}
  expected: *.safetensors
  fix:      pickled weights (.bin, .pt) can run code and are not read; convert them with transformers:
            model.save_pretrained(dir, safe_serialization=True)
IG422: the stored {name!r} has another shape
  expected: {shape}, as the model has it
  fix:      build the model with the config that the weights were made with
IG423: the weights were opened for another model: {name!r} differs
  seen:     {shape} in the model
  expected: {stored}, as the config says that HuggingFace(...) was given
  fix:      give both the same config
IG424: shards of {place} are missing
  expected: every file that model.safetensors.index.json names
  fix:      copy the folder again
IG425: an answer has no log probability under the model that the run starts from
  expected: a number for each answer of a pair that fits
  fix:      weights (model.path) whose logits are finite
IG430: unknown order {order!r} of sequence blocks
IG432: the attention function inside Ulysses returned a shape that differs from its queries
  fix:      return [{order}], the order of dimensions it is given
IG441: the attention of {name} cannot be reached
  expected: a causal language model of transformers, whose tokens are mixed by its attention interface only
  fix:      isograd.models.Transformer, or isograd.sequence.attend inside the model's own attention
IG447: the loss of {name} is not the sum over shift_labels divided by num_items_in_batch
  expected: transformers' ForCausalLMLoss, and no term that is a mean over this rank's tokens
  fix:      output_router_logits=False; or model.loss_function = transformers.loss.loss_utils.ForCausalLMLoss
IG452: the capacity of experts per {capacity_scope} would change with the layout
  seen:     capacity_scope {capacity_scope!r}: which tokens are together in one depends on dp, cp, tp and on the
            micro-batches
  expected: 'sequence': tokens are dropped among those of their own sequence
  fix:      leave capacity_scope out; or leave capacity out, and no token is dropped
IG453: {number} experts cannot be dealt out over ep{ranks}{few}
  seen:     {number} experts, ep{ranks}
  expected: an ep that divides the number of experts
  fix:      the nearest that does is ep{nearest}
IG454: the balance loss of the whole batch needs the counts of all its micro-batches before the first backward
  expected: engine.train_step(batch, micro_batches=k) or engine.accumulate, which count first
  fix:      call engine.count(batch, micro_batches) before the step's first forward; or balance 'lagged', which takes
            the counts of the step before, or 'sequence'
IG455: the scores of experts are NaN: no choice of experts means anything
  expected: scores that are numbers
  fix:      the first of these layers is the place to look: its router's weight, or what came before it, is not
            finite; no rank has stepped, so a checkpoint of the step before is good
IG463: no tensor plan says how {name} is cut over tp
  expected: an architecture for which transformers ships a plan
  fix:      the layout 'dp{size} zero3': dp, cp and zero0 to zero3 need no plan
IG464: the style {style!r} is not supported for {name}
  expected: linear layers, embeddings, and layers of experts in transformers' own form
  fix:      leave out tp and ep: dp, cp and zero0 to zero3 need no plan
IG465: {what_is_cut} cannot be cut over {axis}{size}
  fix:      another {axis}; dp and zero3 cut any model
IG468: {model} would not train right under {layout!r}: gradients differ from one device's
  expected: at most {limit} in fp64
  fix:      its tensor plan does not say all that must be summed: leave tp out (dp and zero need no plan)
IG470: nothing says what the layers of {model} are
  expected: a pipeline plan that names one list, or one list of num_hidden_layers modules
  fix:      leave pp and sp out
IG471: {name} cannot be cut into stages: its layers need more than the output of the layer before
  expected: layers that are given the output of the one before, and what is made of tokens and positions
  fix:      leave pp out: dp, tp and zero0 to zero3 take such a model
IG472: {name} has no experts that could be dealt out over ep
  expected: a plan whose style {style!r} names a module of the model
  fix:      leave ep out; tp, dp and zero need no expert plan
IG474: the loss of {model} is not the mean of the labels that count
  seen:     of one micro-batch: {found} (of a part, of the batch as it is, and cross entropy of its logits)
  expected: three equal numbers: a step of several micro-batches weighs each by its labels
  fix:      ig.Engine takes any module, with a loss and its weight of your own
IG475: {name} of a model of which each rank has a part
  expected: ig.hf.export_hf(engine, folder), on all ranks
  fix:      export the folder, and load it on one device to push it
IG476: the logits of a training step are cut over tp, and were not gathered
  expected: output.loss; or logits of a forward under torch.no_grad(), or without labels
  fix:      ig.hf.load(..., logits=True) gathers them in every forward
IG477: {name} does not keep apart the documents of a row
  expected: the logits that each document has by itself, from positions that begin again
  fix:      --data.packing stream, where texts may see each other; or --model.code isograd for a family that it knows
IG478: base_bits {bits} cannot be trained so
  expected: 4 or 8 bits under LoRA, and a layout without tp and ep: parts of a matrix have other scales
  fix:      --layout 'dp2 zero3'; or leave base_bits out: the base keeps its dtype
IG479: attention cannot be computed by {wanted}
  expected: a class that lets its attention be chosen; for flash_attention_2 also CUDA and flash-attn
  fix:      --model.attn_implementation sdpa
IG480: products of linear layers cannot be computed in float8 ({recipe}) here
IG481: the scales of float8 ({recipe}) would not be those of one device under {layout!r}
  expected: a layout of dp, zero, pp, and of tp that divides key and value heads and leaves multiples of 16; cp with
            rowwise_with_gw_hp
  fix:      --model.float8 rowwise_with_gw_hp under cp; else another tp
IG604: no model's config at {source}
IG611: this {kind} is quantised
  expected: weights in fp32, bf16 or fp16
  fix:      take the weights it was quantised from, or dequantise them with transformers
IG631: no config file {path}
  expected: a YAML file; 'isograd recipes' lists some to start from
IG639: this layout has more ranks than a proof starts on one machine
  expected: at most {most_ranks} ranks
  fix:      prove one with the same axes and fewer ranks: --layouts 'dp2 tp2 sp zero1'
IG641: pairs train a Hugging Face encoder
  expected: a folder with config.json, model.safetensors and a tokenizer
  fix:      --model.path FOLDER
IG644: no page can be served on port {port} of this computer
  expected: a free port
  fix:      leave --port out: a free one is found
IG645: {place} is no run, checkpoint or Hugging Face folder that can write
  expected: a folder with checkpoints, with manifest.json, or with config.json and *.safetensors
IG646: the tokenizer of a model was not found
  expected: a folder with a tokenizer.json
  fix:      --tokenizer DIR; --tokenizer bytes for a model that was trained on bytes
IG647: the tokenizer has no chat template, so messages cannot be given to the model
  expected: a chat_template.jinja beside the tokenizer, or a template in tokenizer_config.json
  fix:      isograd generate PLACE "a text", which needs none; or --tokenizer DIR
IG648: a prompt that leaves the model no room
  expected: at least 1 token, and fewer than {room}, which the model has positions for
IG649: line {line} of {path} is no prompt
  expected: {{"prompt": "a text"}}, or a conversation: {{"messages": [...]}}, or ShareGPT's or Alpaca's form of one
IG654: {path} cannot be had from the Hugging Face hub
  expected: hf://OWNER/MODEL, or hf://datasets/OWNER/NAME/FILE, and the network, or what was downloaded before
  fix:      see the name on the hub; HF_TOKEN for what is private; without a network copy the folder, and give its path
IG655: {folder} cannot be sent to the Hugging Face hub as {name}
  expected: OWNER/NAME, the network, and a token that may write (HF_TOKEN, or hf auth login)
  fix:      the folder is written; send it again with: hf upload {name} {folder}
IG656: lm-eval-harness could not run {tasks}
  expected: names of its tasks, whose data is on this machine or can be fetched
  fix:      lm_eval ls tasks prints the names; --task-folder DIR for tasks of your own, as YAML
IG663: {path} does not hold what it should
  expected: the fields of its format, each of its type
IG666: {path} is in a folder that isograd writes into, and is no plain file of its own
  expected: regular files and folders: nothing outside of the folder is written through it
  fix:      remove it; to keep a run on another disk, link the run's whole folder, or give that disk with --run
IG730: a case has a loss, or a step of its own, not both
  fix:      Case(model, batch, loss=lambda model, part: model(**part).loss)
IG731: the tensors of a case's batch have no common number of rows
  expected: dim 0 of every tensor is the sample
  fix:      put samples first; keep what is not per sample out of the batch
IG733: a case function must return a Case
  fix:      return ig.prove.Case(model, batch, loss=...)
IG734: a case's batch has too few rows to give every data rank its micro-batches
  fix:      give the case at least {count} samples; rows without any valid label are welcome
IG735: under a pipeline a case's model computes its own loss
  expected: Case(model, batch): the model is called with a part of the batch and returns (mean loss, count)
IG800: the schedule {name!r} cannot run
  expected: F, then B or I and W, once for each stage and micro-batch, in an order without a deadlock
IG801: stage {stage} must pass on a tensor or a tuple of tensors
  expected: what the next stage takes; only the last stage returns (loss, weight)
IG802: the output of stage {stage} cannot be described to the next stage
  expected: a few tensors of {known}
IG803: stage {stage} returned other shapes than before for a micro-batch of the same shapes
  fix:      make the shapes between stages depend only on the shapes of the micro-batch
IG804: pipeline ranks were given different batches
  seen:     {count} micro-batches {does} here, unlike those of ranks {unlike} in number, shape or use
  expected: the same call with the same micro-batches on every rank of the pp axis
  fix:      index the data by mesh.index('dp'), not by the global rank
IG805: another stage of the pipeline ended in the middle of a step
  expected: every stage to reach the end of the schedule
  fix:      look at the first error among the ranks: this one only waited for it
IG806: {count} layers cannot be cut into {stages} pipeline stages
  expected: at least one layer for each stage
  fix:      use a pp x vpp of at most {count}, or give split= with zeros for stages of embedding or head alone
IG807: this split does not fit the model and the layout
  expected: {layers} layers on {stages} stages (pp x vpp); only the first and the last stage may be empty
IG808: a model cut into stages cannot be called: its stages run in the order of a schedule
  seen:     a forward under {layout!r}
  expected: engine.train_step({batch}, micro_batches=k), or engine.evaluate
IG851: the optimizer does not step exactly the trainable parameters of the model
  expected: an optimizer of all parameters of the model that require a gradient
  fix:      freeze what should not train with requires_grad_(False); an optimizer of two models needs two engines
IG852: the optimizer has state already, of whole parameters
  expected: an optimizer that has not stepped, and that makes its state in its first step
  fix:      build it anew; to continue a run, load a checkpoint that isograd has saved; or take zero0
IG853: this cannot be asked of an optimizer whose steps are an engine's
IG857: ig.integrations.trainer takes a Trainer class of transformers, once
  expected: Trainer, or a subclass such as SFTTrainer
  fix:      Trainer = ig.integrations.trainer(Trainer), before a Trainer is made
IG858: another Trainer has trained this model since, and holds its gradients now
  seen:     a further train() of the first one
  expected: one Trainer that trains a model at a time
  fix:      make a new Trainer for the model
IG859: the loss has further losses of the experts in it than one balance loss
  expected: aux_loss, once in a micro-batch: a mean over routed tokens; under cp and tp none
  fix:      set their coefficients in the model's config to 0
IG860: {place} is no checkpoint of this integration
  expected: a folder that it has saved, under any layout; those of other programs are pickles
  fix:      start a new run from its weights, exported to safetensors
IG862: join_uneven_inputs is torch's Join, which knows DDP
  expected: ranks that run as many backwards, each with its weight
  fix:      for batch in model.until_all_exhausted(loader): None calls model.skip()
IG864: the numbers of a DeepSpeed config do not fit together
  seen:     train_batch_size {whole}, train_micro_batch_size_per_gpu {each}, gradient_accumulation_steps {steps},
            {ranks} ranks, {shared} of which share their rows
  expected: train_batch_size = micro-batch * accumulation steps * data ranks
  fix:      give the number of ranks with --ranks, or change the file
IG866: {loop} asks for what one engine for each model cannot do
IG867: {name} has no optimizer's state of isograd beside it
  expected: a checkpoint that was saved with this strategy, with its folder
IG868: this cannot be asked of DeepSpeed's loop and Ulysses on isograd's engine
  fix:      docs/integrations/deepspeed.md lists what the integration has
IG869: the gradient is not finite, and no rank has stepped
  expected: a finite norm, as error_if_nonfinite=True asks for
  fix:      error_if_nonfinite=False leaves such a step out
IG870: another rank has left the loop
  expected: all ranks in one loop until its end
  fix:      this rank is well: see that one's error
IG871: a training_step goes backward by itself, and nothing says what its loss is the mean of
  expected: super().training_step(model, inputs, num_items_in_batch)
  fix:      override compute_loss, or loss_weight, instead
IG873: {how}, and a checkpoint does not have it
  seen:     a checkpoint of step {step}
  expected: a run that goes on as it would have without the cut
IG900: {folder} holds no tokens
  expected: a folder with manifest.json, as isograd data build makes it
IG901: {path} is not a manifest that this version reads
  expected: format {format!r}, version {version}
  fix:      build the folder again, or use the version of isograd that made it
IG902: {path} is missing, or has another size than its manifest says
  expected: {size} bytes
  fix:      copy the folder again, or build it again
IG903: {path} holds other bytes than were built
  expected: the sha256 of the manifest
  fix:      copy the files again, or build the folder again
IG904: {path} could not be read
  expected: the file as it was when its folder was opened
  fix:      isograd data verify names the damaged files of the folder
IG907: weights whose blend repeats only after {period} samples
  expected: at most {longest}
  fix:      round them, for example to {rounded}
IG908: tokens of different tokenizers
  expected: one tokenizer for all sources of a mixture, the one whose ids the model's weights have learned
  fix:      build them with the same --tokenizer
IG909: more files than one folder's manifest can list
  expected: at most {shards} shards, and names of inputs of {largest} bytes together
  fix:      larger --shard-bytes; many small files together as .jsonl; or several folders, blended in training
IG910: {path} cannot be read as text
IG911: {path} is empty
  expected: text
  fix:      leave it out
IG912: {path}, line {line}: not UTF-8 text
  seen:     byte 0x{byte:02x} at place {place} of the file
  expected: UTF-8
  fix:      convert it, for example with iconv -t UTF-8
IG913: {path}, line {line}: no text there
  expected: an object with the text under {key!r}
IG914: {path} gives no tokenizer
  expected: 'bytes', a tokenizer.json, or a folder that holds one
  fix:      other formats: load it with transformers; its save_pretrained writes a tokenizer.json
IG916: {folder} holds something else
  expected: a new folder, or this build
IG917: {path} is not the file that this build began with
  expected: inputs that stay as they were when their build began
IG918: {doing} failed
  expected: files that can be read, and a folder that may be written, with room left
  fix:      make room or fix permissions; the same command then resumes where it was
IG919: {path} needs the pyarrow package
  fix:      pip install pyarrow
IG920: {path} cannot be read
  fix:      --text-key names the column of the text
IG922: another build is at work in {folder}
  expected: one build in a folder at a time
  fix:      wait for it, or choose another folder
IG923: there is nothing to train on
  expected: documents with text
IG924: a build that cannot be made
  expected: inputs; documents 'file', 'line' or 'blank'; validation of at least 0 and below 1; special_tokens
            'refuse', 'keep' or 'text'; shard_bytes, workers and largest_document of at least 1
IG925: these options do not describe a file of pairs
  expected: two keys, a batch of at least 1, held_out from 0 to below 1
IG926: {path} has nothing to train on
IG927: {path}: line {number} is no {kind}
  fix:      fix or remove the line
IG928: {path} holds numbers that no build writes
  expected: ids of the vocabulary; ends of documents in ascending order
  fix:      isograd data verify names the damaged files; copy them again, or build the folder again
IG930: {doing} failed
  expected: a folder that can be written, with enough space
  fix:      free space or fix permissions; earlier checkpoints are unchanged
IG931: another job writes its checkpoints into {folder}
  expected: one job in a folder
  fix:      stop that job, or give this run another folder
IG932: the folder {folder} is not the one that rank 0 sees
  seen:     job {other!r} in its lock
  expected: job {job!r}, as rank 0 has written it
  fix:      name a folder on a file system that all machines share
IG933: the ranks are not between the same two steps
  expected: keeper.save(step) of one step on all ranks, after engine.step() and before the next backward
IG934: `extra` is not JSON
  expected: numbers, strings, lists and dicts with string keys
IG935: no checkpoint at {path}
  expected: a folder named like step-00000100, or one that holds such folders
  fix:      give a run's folder (`run` in its config), one of its checkpoints, or a Hugging Face folder with weights
IG936: {place} is damaged
  expected: files with the sizes and hashes that manifest.json lists, and finite values in them
  fix:      'isograd ckpt verify' lists every damaged tensor; take another checkpoint, or start anew elsewhere
IG937: {place} is a checkpoint of another model
  expected: the same options, and the same names, global shapes and dtypes
  fix:      build the model with the config that was saved: 'isograd ckpt inspect' shows what it is of
IG938: {name} has the state of another optimizer
  expected: the optimizer that saved it, for the same trainable parameters
  fix:      use that optimizer again; or take the weights alone: weights=ig.checkpoint.SavedWeights(path), or 'isograd
            ckpt convert' and model.path in a config
IG939: {name} was written by an isograd of another format
  seen:     format version {other}, written by {by}
  expected: version {version}
  fix:      read it with the isograd that wrote it; 'isograd ckpt convert' of that one makes a Hugging Face folder
IG940: the ranks together did not write every element once
  expected: every row of every tensor from one rank
  fix:      is the optimizer's state the same on all ranks? Otherwise please report this
IG942: a {kind} has no form that is known there
  expected: isograd's Transformer, or a model of transformers
  fix:      keeper.save writes safetensors of any model; their tensors have its own names
IG943: {target} exists already
  expected: a new folder, or an empty one
  fix:      another name, or remove that folder
IG944: no tokenizer in {tokenizer}
  expected: tokenizer.json, or its kin
IG945: what was written is not what is read back: {path}
  expected: the same bytes
  fix:      look at the disk and the memory of this machine; nothing got its name, and nothing was removed
IG946: the state after step {step} is not finite, and was not saved
  expected: finite parameters and optimizer state; the checkpoints before this one are as they were
  fix:      resume from the last checkpoint; if it happens again, lower the learning rate or clip gradients
IG947: this model has no adapters
  expected: a model of ig.hf.load(..., adapter=peft.LoraConfig())
  fix:      ig.hf.export_hf and `isograd ckpt convert` write whole models
IG950: {place} has no averages of the weights
  expected: a checkpoint of a run whose config has 'ema'
  fix:      leave --ema out, which writes the weights themselves
IG951: {path} could not be {doing}
  expected: a store that answers, and may be read and written
  fix:      'pip install s3fs' for s3:// and gcsfs for gs://; credentials and endpoints come from the environment
            (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, FSSPEC_...); earlier checkpoints are unchanged
IG952: credentials stand in the address of a store, which is written into logs
  expected: an address without them, as s3://bucket/run
  fix:      put them into the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), or fsspec's config files
IG953: this model cannot be written as a GGUF file
IG960: representations that do not pair up
  expected: queries [n, d], documents [n, d] whose row i belongs to query i, then hard negatives [any, d]
IG961: the inputs of a tower have no common number of rows
  expected: a tensor, or a dict or tuple of tensors, with rows in dim 0; a rank without rows gives 0 of them
IG963: the number of encoders differs from the number of towers
  expected: encode=f, used for every tower, or one for each
IG964: ranks of one cp group were given different rows
  seen:     {rows} rows of each tower on rank {rank}, {first} on another
  expected: the same rows on every rank of a cp group: only dp ranks see different ones
  fix:      index the data by mesh.index('dp'), not by the global rank
IG965: the replay of a chunk gave representations that differ from the first pass
  expected: equal bits: the same weights and inputs, and random numbers from torch's own generators only
IG966: the loss has trainable parameters that the engine does not know: {names}
  seen:     {name}, which is not a submodule of the engine's model
  expected: a loss that is a submodule of the model given to Engine
  fix:      model.loss = InfoNCE(learn_scale=True), then Engine(model, ...) and GradientCache(engine, model.loss)
IG967: GradientCache does not support this chunk size or layout
  seen:     chunk={chunk} under {layout!r}
  expected: a chunk of at least one row, and a layout of dp, cp, tp, sp and zero
IG968: batch norm would normalise over one chunk instead of the batch: {names}
  expected: an encoder whose vectors do not depend on which rows share a chunk
  fix:      use layer, group or RMS norm, or put these modules into eval mode
IG969: ClipLoss was given a rank and a world size that are not those of the running world
IG970: CachedInfoNCE does not support this value of {name!r}
IG971: GradientCache would leave out the balance loss of experts: {layers}
  seen:     {count} layers of experts with a balance loss or a z-loss
  expected: experts whose load a loss does not even: the encoder of a chunk returns vectors alone
  fix:      balance 'none' and z_weight 0; choice_bias evens the load without a loss
IG972: an encoder changed a tensor that its backward needs, or its inputs, in place
  expected: what autograd has saved to be as it was
  fix:      do not change inputs in place, nor activations after they were used; chunks are views of one tensor, and
            share its version
IG973: GradientCache cannot keep graphs of chunks in this amount of memory or under this layout
  expected: a number of MiB, 0 or more; 0 at ZeRO 3 and under ep, where each forward is a collective
IG974: an exception on another rank ended the first pass of a contrastive step
  expected: vectors of all data ranks
  fix:      see the error of that rank. The step is as it was: a program that catches that error should catch this one,
            too, and continue with the next batch on all ranks
IG983: the ranks of this run were given different configs
  expected: one config
  fix:      copy the same file to every machine, and start every rank with the same options
IG984: copies of parameters are no longer equal in step {step}
  expected: equal bytes on every rank of {axes!r}
  fix:      a rank computed or stored something wrong: check its memory, and resume from a checkpoint before it;
            'isograd verify' says whether the layout's gradients are right
IG985: this run's folder holds checkpoints of an earlier run
  expected: --resume auto to resume it, or another folder
  fix:      --run FOLDER, or delete the folder
IG989: the run's folder holds a config.yaml that no run has written; a run would overwrite it
  expected: a folder of its own for a run, or a config.yaml that begins with {written!r}
  fix:      --run FOLDER, or give that file another name
IG990: no conversation to learn from
  expected: {{"messages": [{{"role": "user", "content": "..."}}, {{"role": "assistant", "content": "..."}}]}}, and
            perhaps "tools"; or {{"conversations": [{{"from": "human", "value": "..."}}, {{"from": "gpt", ...}}]}}
  fix:      fix or remove the line; isograd data build --chat --on-bad-lines skip leaves such lines out and counts them
IG991: {folder} has no tokenizer with a chat template
  expected: a folder with tokenizer.json, tokenizer_config.json and a chat template
  fix:      name it: --tokenizer FOLDER (isograd train: --data.tokenizer FOLDER)
IG992: it is not certain which tokens the assistant writes
  expected: a template whose text of an answer can be told from the text before and behind it
  fix:      add {{% generation %}} and {{% endgeneration %}} around the assistant's words in the chat template
"""
