{{/* Engines that already run outside the release, and the tokenizers that gateways read for engines that are not Moiety's. */}}

{{/* The tokenizers, as a JSON list of {name, path, claim, hub, revision, hubTokenSecret}. Each is mounted at /models/NAME. */}}
{{- define "moiety.tokenizers" -}}
{{- $found := list -}}
{{- range .Values.engines -}}
{{- $pool := include "moiety.wholePool" (list $ .) | fromJson -}}
{{- if eq $pool.kind "vllm" -}}
{{- $model := $pool.model -}}
{{- $hub := $model.tokenizerHub | default $model.hub -}}
{{- $found = append $found (dict "name" $pool.name "path" $model.tokenizerPath "claim" $model.tokenizerClaim "hub" $hub "revision" $model.tokenizerRevision "hubTokenSecret" $model.hubTokenSecret) -}}
{{- end -}}
{{- end -}}
{{- range .Values.externalEngines -}}
{{- $name := .name -}}
{{- with .tokenizer -}}
{{- $found = append $found (merge (dict "name" $name) .) -}}
{{- end -}}
{{- end -}}
{{- $found | toJson -}}
{{- end -}}

{{/* Of an external engine: its address, as gateways are told. */}}
{{- define "moiety.externalAddress" -}}
{{- if .address -}}
{{- .address -}}
{{- else -}}
{{- if eq .kind "hosted" -}}
{{- printf "%s+%s?model=%s&kind=hosted&context=%d" (.api | default "openai") (.url | trimSuffix "/") (.model | urlquery) (int64 .contextTokens) -}}
{{- with .servedName }}&name={{ . | urlquery }}{{ end -}}
{{- with .maxOutputTokens }}&max_output={{ int64 . }}{{ end -}}
{{- with .timeoutSeconds }}&timeout={{ int64 . }}{{ end -}}
{{- if hasKey . "retries" }}&retries={{ int64 .retries }}{{ end -}}
{{- with .limitField }}&limit_field={{ . }}{{ end -}}
{{- else -}}
{{- $folder := printf "/models/%s/%s" .name ((.tokenizer | default dict).path | default "") | trimSuffix "/" -}}
{{- printf "openai+%s?model=%s&kind=%s&tokenizer=%s" (.url | default "" | trimSuffix "/") (.model | default "" | urlquery) .kind $folder -}}
{{- if .priority }}&priority=on{{ end -}}
{{- with .contextTokens }}&context={{ int64 . }}{{ end -}}
{{- if .sharedCache }}&shared_cache=on{{ end -}}
{{- end -}}
{{- with .imageTokens }}&image_tokens={{ int64 . }}{{ end -}}
{{- if .keySecret }}&key_file=/etc/moiety-engine-keys/{{ .name }}/key{{ end -}}
{{- end -}}
{{- end -}}

{{/* The declared objects, with the prices of hosted providers, as JSON. */}}
{{- define "moiety.declaredObjects" -}}
{{- $declared := omit .Values.declared "prune" "waitSeconds" "existingClasses" -}}
{{- $prices := list -}}
{{- range .Values.externalEngines -}}
{{- $name := .servedName | default .model -}}
{{- with .price }}{{ $prices = append $prices (merge (dict "model" $name) .) }}{{ end -}}
{{- end -}}
{{- if $prices }}{{ $declared = merge (dict "prices" (concat ($declared.prices | default list) $prices)) $declared }}{{ end -}}
{{- $declared | toJson -}}
{{- end -}}

{{/* Of (list root part): containers that download tokenizers from the hub before the gateway starts. */}}
{{- define "moiety.downloadTokenizers" -}}
{{- $root := index . 0 -}}
{{- $part := index . 1 -}}
{{- range include "moiety.tokenizers" $root | fromJsonArray }}
{{- if not .claim }}
- name: tokenizer-{{ .name }}
  {{- include "moiety.fromGateway" (list $root $part) | nindent 2 }}
  args:
    - cluster
    - tokenizer
    - {{ .hub | quote }}
    - /models/{{ .name }}
    {{- with .revision }}
    - --revision={{ . }}
    {{- end }}
  env:
    - {name: HF_HOME, value: /tmp/hub}
    {{- with .hubTokenSecret }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef: {name: {{ . }}, key: token}
    {{- end }}
    {{- include "moiety.extraEnv" $part | nindent 4 }}
  {{- include "moiety.envFrom" $part | nindent 2 }}
  resources:
    {{- toYaml $root.Values.jobs.resources | nindent 4 }}
  volumeMounts:
    - {name: tokenizer-{{ .name }}, mountPath: /models/{{ .name }}}
    - {name: scratch, mountPath: /tmp}
{{- end }}
{{- end }}
{{- end -}}

{{- define "moiety.externalMounts" -}}
{{- range include "moiety.tokenizers" . | fromJsonArray }}
- {name: tokenizer-{{ .name }}, mountPath: /models/{{ .name }}, readOnly: true}
{{- end }}
{{- range .Values.externalEngines }}
{{- if .keySecret }}
- {name: engine-key-{{ .name }}, mountPath: /etc/moiety-engine-keys/{{ .name }}, readOnly: true}
{{- end }}
{{- end }}
{{- end -}}

{{- define "moiety.externalVolumes" -}}
{{- range include "moiety.tokenizers" . | fromJsonArray }}
- name: tokenizer-{{ .name }}
  {{- if .claim }}
  persistentVolumeClaim: {claimName: {{ .claim }}, readOnly: true}
  {{- else }}
  emptyDir: {sizeLimit: 1Gi}
  {{- end }}
{{- end }}
{{- range .Values.externalEngines }}
{{- if .keySecret }}
- name: engine-key-{{ .name }}
  secret:
    secretName: {{ .keySecret }}
    defaultMode: 0440
    items: [{key: key, path: key}]
{{- end }}
{{- end }}
{{- end -}}

{{/* The ports outside the release that gateways need for external engines and for tokenizers of the hub, as a JSON list. */}}
{{- define "moiety.externalPorts" -}}
{{- $ports := list -}}
{{- range .Values.externalEngines -}}{{- $ports = append $ports (include "moiety.portOf" (.address | default .url) | int) -}}{{- end -}}
{{- range include "moiety.tokenizers" . | fromJsonArray -}}{{- if not .claim -}}{{- $ports = append $ports 443 -}}{{- end -}}{{- end -}}
{{- $ports | uniq | toJson -}}
{{- end -}}
