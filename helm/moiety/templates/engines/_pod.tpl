{{/* Of (list root pool role): the pods of our own engines. `all`: one has all ranks; `leader` has the first, and is what
gateways talk to; `worker` has others, whose end ends the group. */}}
{{- define "moiety.enginePod" -}}
{{- $root := index . 0 -}}
{{- $pool := index . 1 -}}
{{- $role := index . 2 -}}
serviceAccountName: {{ include "moiety.fullname" $root }}-engine
automountServiceAccountToken: false
{{- with $pool.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{ include "moiety.pod" (list $root $pool (printf "engine-%s" $pool.name)) }}
terminationGracePeriodSeconds: {{ add $pool.drainSeconds 30 }}
{{- include "moiety.initContainers" (list $pool "") | nindent 0 }}
containers:
  - name: engine
    {{- include "moiety.from" (list $root $pool "engine") | nindent 4 }}
    {{- include "moiety.workingDirectory" $root | nindent 4 }}
    {{- if eq $role "all" }}
    args:
      - engine
    {{- else }}
    command: [torchrun]
    args:
      - --nnodes=$(LWS_GROUP_SIZE)
      - --node-rank=$(LWS_WORKER_INDEX)
      - --nproc-per-node={{ max 1 (int $pool.gpus) }}
      - --master-addr=$(LWS_LEADER_ADDRESS)
      - --master-port=29500
      - -m
      - moiety_platform.cli
      - engine
      - --join-timeout-s={{ $pool.startSeconds }}
      - --allow-unauthenticated-ranks
    {{- end }}
      - --listen=tcp://0.0.0.0:5757
      - --metrics-listen=0.0.0.0:9400
      {{- with include "moiety.modelPath" (list $root $pool) }}
      - --model={{ . }}
      {{- end }}
      {{- with $pool.model.name }}
      - --name={{ . }}
      {{- end }}
      - --device={{ ternary "cuda" "cpu" (gt (int $pool.gpus) 0) }}
      - --drain-s={{ $pool.drainSeconds }}
      - --curve-key-file=/etc/moiety/curve/key
      - --gateway-keys-file=/etc/moiety/curve/gateways
      - --unacknowledged-usage=/var/lib/moiety/unsettled.usage
      {{- if ne $pool.role "both" }}
      - --role={{ $pool.role }}
      {{- end }}
      {{- if eq $pool.role "decode" }}
      - --kv-listen=tcp://0.0.0.0:5758
      {{- end }}
      {{- include "moiety.options" (list $root $pool) | nindent 6 }}
    env:
      {{- if ne $role "all" }}
      - {name: GLOO_SOCKET_IFNAME, value: eth0}
      - {name: NCCL_SOCKET_IFNAME, value: eth0}
      {{- end }}
      - {name: NUMBA_CACHE_DIR, value: /tmp/numba}
      - {name: TRITON_CACHE_DIR, value: /tmp/triton}
      - {name: USER, value: moiety}
      {{- include "moiety.hubVariables" (list $root $pool) | nindent 6 }}
      {{- include "moiety.extraEnv" $pool | nindent 6 }}
    {{- include "moiety.envFrom" $pool | nindent 4 }}
    ports:
      - {name: engine, containerPort: 5757}
      - {name: metrics, containerPort: 9400}
      {{- if eq $pool.role "decode" }}
      - {name: kv, containerPort: 5758}
      {{- end }}
    {{- if ne $role "worker" }}
    {{- include "moiety.poolProbes" (list $pool (dict "tcpSocket" (dict "port" "engine"))) | nindent 4 }}
    {{- end }}
    resources:
      {{- include "moiety.poolResources" (list $root $pool) | nindent 6 }}
    volumeMounts:
      - {name: curve, mountPath: /etc/moiety/curve, readOnly: true}
      - {name: state, mountPath: /var/lib/moiety}
      - {name: shared-memory, mountPath: /dev/shm}
      - {name: scratch, mountPath: /tmp}
      {{- include "moiety.modelMount" (list $root $pool) | nindent 6 }}
      {{- include "moiety.extraMounts" $pool | nindent 6 }}
volumes:
  - name: curve
    secret:
      secretName: {{ include "moiety.secret" $root }}
      defaultMode: 0440
      items:
        - {key: curve-engine-secret, path: key}
        - {key: curve-gateway-public, path: gateways}
  - name: shared-memory
    emptyDir: {medium: Memory, sizeLimit: {{ $pool.sharedMemory }}}
  - name: scratch
    emptyDir: {}
  {{- if not $pool.stateSize }}
  - name: state
    emptyDir: {sizeLimit: 1Gi}
  {{- end }}
  {{- include "moiety.modelVolume" (list $root $pool) | nindent 2 }}
  {{- include "moiety.extraVolumes" $pool | nindent 2 }}
{{- end -}}
